"""Fine-tune a Hugging Face model with its attention served by fastattn.

pip install ".[hf]"
python examples/finetune_hugging_face.py --model gpt2 --text notes.txt
python examples/finetune_hugging_face.py    # a tiny model of the Llama family, from scratch
"""

# ruff: noqa: T201 (an example prints)

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import fastattn
from fastattn.compat import transformers as fastattn_transformers


def load(name: str | None, text: str, device: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """The model, and the text's tokens; without a name each byte is a token."""
    if name is None:
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        model = AutoModelForCausalLM.from_config(config, attn_implementation="fastattn")
        tokens = torch.tensor(list(text.encode()))
    else:
        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fastattn")
        tokens = AutoTokenizer.from_pretrained(name)(text, return_tensors="pt").input_ids[0]
    return model.to(device).train(), tokens.to(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder, or a name on the hub")
    parser.add_argument("--text", type=Path, default=Path(fastattn.__file__).parent / "options.py")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    fastattn_transformers.register()
    model, tokens = load(options.model, options.text.read_text(encoding="utf-8"), device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    first = last = None
    for step in range(options.steps):
        starts = torch.randint(len(tokens) - options.length, (options.batch,)).tolist()
        batch = torch.stack([tokens[i : i + options.length] for i in starts])
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            loss = model(batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        last = loss.item()
        first = first if first is not None else last
        if step % 10 == 0 or step + 1 == options.steps:
            print(f"step {step:4}  loss {last:.3f}")
    print(f"loss {first:.3f} -> {last:.3f}")


if __name__ == "__main__":
    main()
