"""Writes the data sets that tinker-cookbook's recipes load into the cache of `datasets`, as if they had been downloaded.

Run as a program with the folder of HF_HOME, in an environment that has `datasets`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import datasets

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
ROWS = 256


def conversations() -> list[dict[str, Any]]:
    """Returns what the recipe of supervised learning reads: a number, and its name."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"Spell the number {index % 10}."},
                {"role": "assistant", "content": WORDS[index % 10]},
            ]
        }
        for index in range(ROWS)
    ]


def questions() -> list[dict[str, Any]]:
    """Returns what the recipe of reinforcement learning reads: a question, and its answer after `####`."""
    return [{"question": f"Repeat the number {n}.", "answer": f"#### {n}"} for n in (3, 8) * (ROWS // 2)]


def write(home: Path, name: str, config: str, rows: list[dict[str, Any]]) -> None:
    """Writes a data set with the split `train`."""
    made = datasets.Dataset.from_list(rows)
    short = name.rpartition("/")[2]
    folder = home / "datasets" / name.replace("/", "___") / config / "0.0.0" / ("0" * 40)
    folder.mkdir(parents=True)
    stored = home / f"{short}.stored"
    made.save_to_disk(stored)
    [arrow] = stored.glob("*.arrow")
    arrow.rename(folder / f"{short}-train.arrow")
    info = made.info
    info.builder_name, info.dataset_name, info.config_name, info.version = "parquet", short, config, "0.0.0"
    info.splits = datasets.SplitDict()
    info.splits.add(datasets.SplitInfo(name="train", num_examples=len(rows), dataset_name=short))
    info.write_to_directory(str(folder))
    assert json.loads((folder / "dataset_info.json").read_text())["splits"]


if __name__ == "__main__":
    write(Path(sys.argv[1]), "HuggingFaceH4/no_robots", "default", conversations())
    write(Path(sys.argv[1]), "openai/gsm8k", "main", questions())
