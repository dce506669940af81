"""What a CUDA graph being captured means for tensors that are made once and kept."""

import torch


def may_keep(device: torch.device) -> bool:
    """Whether a tensor made now may be kept for later calls.

    While a CUDA graph is captured its contents are only recorded, and its memory is the graph's.
    """
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()
