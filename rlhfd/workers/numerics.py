"""What decides the bits of a learner step besides its inputs: the redo log's key for exact replay.

Measured: AdamW's fused and foreach variants, another CPU capability and another attention each give other bits;
thread count and checkpointing gave the same ones, and are recorded all the same.
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


def numerics(settings: wire.LearnerSettings, device: torch.device) -> dict[str, str]:
    """The key: equal keys and equal inputs give equal bits on a CPU, and close ones on a GPU."""
    return {
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "peft": peft.__version__,
        "device": _device_name(device),
        "threads": str(torch.get_num_threads()),
        "dtype": settings.dtype,
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
