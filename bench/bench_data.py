"""Loader throughput on this machine as JSON: see `llmq_nb.data.bench`."""

import argparse
import json

from llmq_nb.data.bench import run


def main() -> None:
    parser = argparse.ArgumentParser(description="Loader tokens/s")
    parser.add_argument("--tokens", type=int, default=40_000_000)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--vocab-size", type=int, default=259)
    arguments = parser.parse_args()
    print(json.dumps(run(**vars(arguments)), indent=2))


if __name__ == "__main__":
    main()
