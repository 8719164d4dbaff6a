"""Shows: steps and what must come of them, written by the oracle for programs without Python.

Run with: python examples/c/vectors.py --config kimi_k3 --ranks 4 --max-tokens 8 -o build/vectors
"""

from pathlib import Path

import click
import ml_dtypes
import numpy as np

import ep
from ep.bench.cases import EPS, Case

FORMAT = 1
"""As in vectors.h."""


def write_step(path: Path, case: Case, number: int, tokens: int, rank: int) -> None:
    """Write one rank's half of a step: its inputs, its rows, and the result."""
    step = case.step(number, tokens)
    rows, norm_weight = step.expected_rows(rank), case.norm_weight
    assert norm_weight is not None
    # What rows that nothing came into are multiplied with is not read: any will do.
    partials = step.partials(rank, rows.source)
    partials[rows.source == -1] = np.array(np.nan, ml_dtypes.bfloat16)
    arrays = [*step.inputs(rank), partials, norm_weight]
    arrays += [rows.x, rows.scales, rows.ids, rows.weights, rows.source, step.expected_result(rank)]
    with path.open("wb") as file:
        file.write(np.array([FORMAT, step.counts[rank]], np.int32).tobytes())
        file.write(np.array([EPS], np.float32).tobytes())
        for array in arrays:
            file.write(np.ascontiguousarray(array).tobytes())


@click.command()
@click.option("--config", "source", default="kimi_k3", show_default=True)
@click.option("--ranks", type=int, required=True)
@click.option("--max-tokens", type=int, required=True)
@click.option("--steps", type=int, default=6, show_default=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
def main(source: str, ranks: int, max_tokens: int, steps: int, output: Path) -> None:
    """Write a file for each rank and step; ranks send different numbers of tokens."""
    config = ep.EpConfig.load(source, ranks=ranks, max_tokens=max_tokens)
    case = Case(config=config, uneven=True)
    output.mkdir(parents=True, exist_ok=True)
    for number in range(steps):
        tokens = (max_tokens, 0, 1, max_tokens // 2)[number % 4]
        for rank in range(ranks):
            write_step(output / f"step{number}_rank{rank}.bin", case, number, tokens, rank)
    print(f"{output}: {steps} steps of {ranks} ranks")


if __name__ == "__main__":
    main()
