"""Tensors of torch as the words of files, and back."""

import numpy as np
import torch
from torch import Tensor, nn

from fulmen_algorithm.weights.tensor_files import RawTensor, word_type

DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_UPPER_HALF = np.uint32(16)


def published_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns a model's tensors by name: parameters, each once whatever names it has, and buffers that are saved."""
    state = model.state_dict(keep_vars=True)
    names = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    return {name: tensor for name, tensor in state.items() if name in names}


def raw_tensor(tensor: Tensor) -> RawTensor:
    """Returns the words of a tensor; on the CPU they are its own memory."""
    flat = tensor.detach().cpu().contiguous().flatten()
    dtype = DTYPES[tensor.dtype]
    words = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
    return RawTensor(dtype=dtype, shape=tuple(tensor.shape), words=words.view(word_type(dtype)))


def tensor_of(raw: RawTensor, dtype: torch.dtype) -> Tensor:
    """Converts words to a tensor; bfloat16 becomes float32 bit by bit, for any number."""
    if raw.dtype == "BF16" and dtype is torch.float32:
        words = raw.words.astype(np.uint32)
        words <<= _UPPER_HALF
        return torch.from_numpy(words).view(torch.float32).reshape(raw.shape)
    own = next(kind for kind, name in DTYPES.items() if name == raw.dtype)
    tensor = torch.from_numpy(np.array(raw.words).view(np.uint8)).view(own)
    return tensor.reshape(raw.shape).to(dtype)
