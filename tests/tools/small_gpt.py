"""Small models for tests."""

from typing import Any

import torch

from fastattn.models.gpt import GPT, GPTConfig


def make_gpt(vocab_size: int = 20, context: int = 12, std: float = 0.5, **changes: Any) -> GPT:
    """A GPT in evaluation mode whose random weights make every token depend on those before it.

    Args:
        vocab_size, context: as in `GPTConfig`.
        std: standard deviation of every parameter. Larger ones give sharper distributions.
        changes: further fields of `GPTConfig`.
    """
    sizes = {"context_length": context, "num_layers": 2, "num_heads": 2, "embed_dim": 16}
    return randomised(GPT(GPTConfig(vocab_size, **{**sizes, **changes})), std)


def randomised(model: Any, std: float = 0.3) -> Any:
    """The model in evaluation mode, with every parameter large enough to matter."""
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return model.eval()


def called(model: Any) -> Any:
    """The model with linear layers that must be called, as quantised ones: they show no weight."""
    for module in [*model.modules()]:
        for name, part in module.named_children():
            if type(part) is torch.nn.Linear:
                shell: Any = torch.nn.Module()
                shell.in_features, shell.forward = part.in_features, part.forward
                setattr(module, name, shell)
    return model
