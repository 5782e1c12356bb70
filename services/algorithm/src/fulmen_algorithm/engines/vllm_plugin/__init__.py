"""The folder that vLLM's own environment is given: `fulmen_vllm.py` alone, which imports nothing of Fulmen."""
