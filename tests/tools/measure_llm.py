"""Tokens per second of a checkpoint through LLM.generate: decode at 1, 8 and 32 rows, prefill of 1024 tokens.

    python measure_llm.py MODEL [--weights bfloat16|float32|packed|auto] [--row-tile 16]

The best of two runs each, greedy, random prompts. Run it on a quiet machine and compare within one run of the machine.
"""

import argparse
import time

import numpy as np

from rorqual.serve import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--row-tile", type=int, default=0)
    options = parser.parse_args()
    llm = LLM(options.model, context=4096, max_rows=32, weights=options.weights, row_tile=options.row_tile)
    vocab, rng = llm.engine.limits.vocab_size, np.random.default_rng(0)

    def tokens_per_s(num_rows: int, prompt: int, generated: int, counted: int) -> float:
        params = SamplingParams(max_tokens=generated, temperature=0, ignore_eos=True)
        seconds = []
        for _ in range(2):
            prompts = rng.integers(3, vocab - 1000, (num_rows, prompt)).tolist()
            started = time.monotonic()
            llm.generate(prompts, params)
            seconds.append(time.monotonic() - started)
        return counted / min(seconds)

    tokens_per_s(1, 8, 4, 4)
    for num_rows in (1, 8, 32):
        print(f"decode, {num_rows} rows: {tokens_per_s(num_rows, 8, 24, 24 * num_rows):.1f} tokens/s")
    print(f"prefill of 1024: {tokens_per_s(1, 1024, 1, 1024):.1f} tokens/s")
    llm.close()


if __name__ == "__main__":
    main()
