"""Merges a LoRA adapter into its base model: `python -m fulmen_algorithm.weights.merging BASE ADAPTER TARGET`.

A merged weight is W + (alpha / r) · B · A (arXiv:2106.09685, section 4.1), computed in float32 and kept in the base model's
number format.
"""

import sys
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def merge(base: Path, adapter: Path, target: Path) -> None:
    """Writes a complete folder with one adapter, a folder in peft's format, merged into a base model."""
    dtype = getattr(AutoConfig.from_pretrained(base, local_files_only=True), "dtype", None) or torch.float32
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, local_files_only=True)
    merged = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    merged.to(dtype).save_pretrained(target)
    AutoTokenizer.from_pretrained(base, local_files_only=True).save_pretrained(target)


if __name__ == "__main__":
    merge(*map(Path, sys.argv[1:4]))
