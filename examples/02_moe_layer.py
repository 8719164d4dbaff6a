"""Shows: a whole MoE layer, from router to norm, on the host backend and as one graph on GPUs.

Run with: mpirun -np 4 python examples/02_moe_layer.py (or alone, for one rank)
          mpirun -np 2 python examples/02_moe_layer.py --backend gpu
"""

import argparse

import ep
from moe.dense import Dense
from moe.host import HostLayer
from moe.model import Gate, Layer, Model, tokens

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 512, 256, 16, 4
MAX_TOKENS = 16
STEPS = {"host": 6, "gpu": 300}


def main() -> None:
    """Make steps of changing numbers of tokens, and check each against the dense reference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=STEPS, default="host")
    parser.add_argument("--gate", choices=[*Gate], type=Gate, default=Gate.SOFTMAX)
    parser.add_argument("--steps", type=int, help="6 on hosts and 300 on GPUs, if not given")
    options = parser.parse_args()
    model = Model.random(HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, options.gate)
    dense = Dense(model)
    with ep.World.connect(options.backend) as world:
        config = ep.EpConfig(
            ranks=world.size, hidden=HIDDEN, experts=EXPERTS, top_k=TOP_K, max_tokens=MAX_TOKENS
        )
        with ep.Exchange(world, config) as exchange:
            layer = make_layer(exchange, model)
            steps = options.steps or STEPS[options.backend]
            worst = 0.0
            for number in range(steps):
                # From 0 to MAX_TOKENS, and other ones on every rank.
                count = (7 * number + 5 * world.rank) % (MAX_TOKENS + 1)
                x = tokens(number, world.rank, count, HIDDEN)
                ids, weights, y = layer(x)
                worst = max(worst, dense.check(x, ids, weights, y))
            layer.close()
            print(
                f"rank {world.rank}: {steps} steps of 0 to {MAX_TOKENS} tokens came back right, "
                f"errors up to {worst:.2%}",
                flush=True,
            )


def make_layer(exchange: ep.Exchange, model: Model) -> Layer:
    """The layer on the backend of `exchange`."""
    if exchange.world.backend == "gpu":
        # Imported here: it needs libraries that hosts do not have.
        from moe.neighbour import CrowdedLayer

        return CrowdedLayer(exchange, model)
    return HostLayer(exchange, model)


if __name__ == "__main__":
    main()
