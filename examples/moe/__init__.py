"""What `02_moe_layer.py` is made of: the model, its layer on hosts and on GPUs, and the reference.

- `model.py`: the weights;
- `host.py`, `gpu.py`: the layer on each backend, router, dispatch, experts, combine;
- `neighbour.py`: the same on a GPU that is busy;
- `router.py`, `grouping.py`, `experts.py`: kernels that `gpu.py` launches, and `images.py` keeps;
- `dense.py`: what the layer must give, without ranks.
"""
