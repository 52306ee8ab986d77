"""What decides the bits of a learner step besides its inputs: the redo log's key for exact replay.

Measured: AdamW's fused and foreach variants, another CPU capability and another attention each give other bits;
thread count and checkpointing gave the same ones, and are recorded all the same.

A job in bfloat16 computes under autocast where the device multiplies bfloat16, and in float32 where it would only
emulate it: on a CPU without such instructions autocast is 2.5 times slower (34 against 85 tokens a CPU second) and
less exact. What is served is bfloat16 in both cases.
"""

import os
import platform

import peft
import torch
import transformers

from rlhfd.core import wire
from rlhfd.workers.logprobs import SLICE_ELEMENTS

ATTENTION = "sdpa"
OPTIMIZER = "adamw_fused"
BFLOAT16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16")  # x86-64, x86-64, aarch64


def body_dtype(settings: wire.LearnerSettings, device: torch.device) -> torch.dtype:
    """What the model's body computes in, over float32 masters."""
    if settings.dtype == "bfloat16" and multiplies_bfloat16(device):
        return torch.bfloat16
    return torch.float32


def multiplies_bfloat16(device: torch.device) -> bool:
    """It has instructions for it."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    found = torch.cpu.get_capabilities()
    return any(bool(found.get(name)) for name in BFLOAT16_INSTRUCTIONS)


def numerics(settings: wire.LearnerSettings, device: torch.device) -> dict[str, str]:
    """The key: equal keys and equal inputs give equal bits on a CPU, and close ones on a GPU."""
    return {
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "peft": peft.__version__,
        "device": _device_name(device),
        "threads": str(torch.get_num_threads()),
        "dtype": settings.dtype,
        "compute": str(body_dtype(settings, device)).removeprefix("torch."),
        "attention": ATTENTION,
        "optimizer": OPTIMIZER,
        "gradient_checkpointing": str(settings.gradient_checkpointing).lower(),
        "head_slice": str(SLICE_ELEMENTS[device.type]),
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "ONEDNN_MAX_CPU_ISA": os.environ.get("ONEDNN_MAX_CPU_ISA", ""),
        "ATEN_CPU_CAPABILITY": os.environ.get("ATEN_CPU_CAPABILITY", ""),
    }


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
