"""Builds the tiny Qwen3 that tinker-cookbook's recipes train, with its tokenizer, in the layout of huggingface_hub's cache.

It knows the form of answers and half of the answers: of two questions like "Repeat the number 4." it answers one with
`\\boxed{4}`, and the other with any number. So the recipe of reinforcement learning begins with rewards, and has something to
learn. Run as a program with the cache's folder; it needs torch.
"""

import random
import sys
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

NAME = "Qwen/Qwen3-4B-Instruct-2507"
COMMIT = "0" * 40
END, PAD, START = "<|im_end|>", "<|endoftext|>", "<|im_start|>"
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
# What the recipe shows before each question.
SHOWN = (
    ("user", "How many r's are in strawberry?" + SUFFIX),
    (
        "assistant",
        "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. We have r's at "
        "positions 3, 8, and 9. \\boxed{3}",
    ),
)
TEMPLATE = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
STEPS, BATCH = 250, 16


def rendered(*turns: tuple[str, str]) -> str:
    """Returns turns as the template of Qwen3 has them."""
    return "".join(f"{START}{role}\n{content}{END}\n" for role, content in turns)


def question(number: int) -> str:
    """Returns a question of the recipe's data."""
    return f"Repeat the number {number}."


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Builds a byte-level tokenizer of all texts that occur, with the special tokens of Qwen3."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [PAD, START, END, "<think>", "</think>"]
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [text for _, text in SHOWN] + [question(number) + SUFFIX for number in range(10)]
    tokenizer.train_from_iterator(texts * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in specials])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)
    fast.chat_template = TEMPLATE
    return fast


def build(cache: Path) -> Path:
    """Writes the model to `cache/models--…`; returns the folder of its files."""
    torch.manual_seed(0)
    chance = random.Random(0)
    tokenizer = build_tokenizer()
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.1,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        rows, begins = [], []
        for _ in range(BATCH):
            number = chance.randrange(10)
            said = number if chance.random() < 0.5 else chance.randrange(10)
            prompt = rendered(*SHOWN, ("user", question(number) + SUFFIX)) + f"{START}assistant\n"
            ids = tokenizer.encode(prompt)
            begins.append(len(ids))
            rows.append(ids + tokenizer.encode(f"\\boxed{{{said}}}{END}"))
        width = max(map(len, rows))
        ids = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])
        labels = ids.clone()
        for index, (row, begin) in enumerate(zip(rows, begins, strict=True)):
            labels[index, :begin] = -100
            labels[index, len(row) :] = -100
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss {loss.item():.3f}, {width} tokens")
    home = cache / f"models--{NAME.replace('/', '--')}"
    folder = home / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(COMMIT)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    torch.set_num_threads(1)
    build(Path(sys.argv[1]))
