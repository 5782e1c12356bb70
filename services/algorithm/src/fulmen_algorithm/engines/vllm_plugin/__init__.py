"""The folder that is put on the module path of vLLM: only `fulmen_vllm.py`, which does not import Fulmen."""
