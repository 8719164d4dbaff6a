"""What `02_moe_layer.py` is made of: the model, its layer on hosts and on GPUs, and the reference.

- `model.py`: the weights, and who owns which;
- `host.py`, `gpu.py`: the layer on each backend, router, dispatch, experts, combine;
- `router.py`, `grouping.py`, `experts.py`: the kernels that `gpu.py` launches; `images.py` keeps them;
- `dense.py`: what the layer must give, without ranks.
"""
