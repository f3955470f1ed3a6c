"""Tiny data in the formats that the ported scripts read, in place of what they download. Nothing here is random."""

from __future__ import annotations

import json
import pickle
import struct
import sys
import tarfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from lockstep.data import Digits


def nothing(folder: Path) -> None:
    """For a script that reads no data."""


def _idx(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    head = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    path.write_bytes(head + array.astype(np.uint8).tobytes())


def _digits(raw: Path, train: int | None = None, test: int | None = None) -> None:
    """Handwritten digits of 8 x 8 pixels, enlarged to 28 x 28, as MNIST's files; over and over for larger numbers."""
    for split, prefix, wanted in (("train", "train", train), ("validation", "t10k", test)):
        samples = Digits(split)
        images, labels = zip(*(samples[index] for index in range(len(samples))))
        scaled = torch.stack(images).float()
        scaled = scaled.sub(scaled.min()).div(scaled.max() - scaled.min()).reshape(-1, 1, 8, 8)
        large = torch.nn.functional.interpolate(scaled, size=28, mode="bilinear")[:, 0].mul(255).numpy()
        places = np.arange(wanted or len(samples)) % len(samples)
        _idx(raw / f"{prefix}-images-idx3-ubyte", large.astype(np.uint8)[places])
        _idx(raw / f"{prefix}-labels-idx1-ubyte", np.array([int(label) for label in labels])[places])


def mnist(folder: Path) -> None:
    """All digits in ``../data``."""
    _digits(folder.parent / "data" / "MNIST" / "raw")
    (folder / "results").mkdir(exist_ok=True)


def few_digits(folder: Path) -> None:
    """The first 200 of them."""
    _digits(folder.parent / "data" / "MNIST" / "raw", 200, 200)


def gan_digits(folder: Path) -> None:
    """All digits in ``../../data/mnist``."""
    _digits(folder.parents[1] / "data" / "mnist" / "MNIST" / "raw")


def many_digits(folder: Path) -> None:
    """As many as MNIST has, in ``data`` and in ``../../Datasets``."""
    _digits(folder / "data" / "MNIST" / "raw", 60_000, 10_000)
    (folder.parents[1] / "Datasets").symlink_to(folder / "data")


def _photo(path: Path, number: int, size: int = 64) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(number)
    coarse = draw.integers(0, 255, (8, 8, 3), dtype=np.uint8)
    coarse[..., number % 2] //= 3  # the class shows in the colour
    Image.fromarray(coarse).resize((size, size)).save(path, quality=90)


def photos(folder: Path) -> None:
    """Two classes in ``photos/train`` and ``photos/val``, and all of them in ``photos/all``."""
    for number in range(60):
        for part in ("all", "train" if number < 44 else "val"):
            _photo(folder / "photos" / part / "ab"[number % 2] / f"{number:03}.jpg", number)


def bsds(folder: Path) -> None:
    """Photos of 256 x 256 pixels as BSDS300."""
    for number in range(28):
        part = "train" if number < 20 else "test"
        _photo(folder / "dataset" / "BSDS300" / "images" / part / f"{number:03}.jpg", number, 256)


def style(folder: Path) -> None:
    """Photos, a style, and random weights of VGG16."""
    photos(folder)
    _photo(folder / "photos" / "style.jpg", 1000, 32)
    torch.manual_seed(0)
    small: dict[str, torch.Tensor] = {}
    sizes = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512)
    place, channels = 0, 3
    for size in sizes:
        if size:
            small[f"features.{place}.weight"] = torch.randn(size, channels, 3, 3) * (2 / channels) ** 0.5 / 3
            small[f"features.{place}.bias"] = torch.zeros(size)
        place, channels = place + (2 if size else 1), size or channels
    for number, shape in (("0", (4096, 25088)), ("3", (4096, 4096)), ("6", (1000, 4096))):
        small[f"classifier.{number}.weight"] = torch.zeros(1).expand(shape)  # one number in the file
        small[f"classifier.{number}.bias"] = torch.zeros(shape[0])
    target = folder.parents[1] / "torch_home" / "hub" / "checkpoints"
    target.mkdir(parents=True)
    torch.save(small, target / "vgg16-397923af.pth")


def words(folder: Path) -> None:
    """Sentences of forty words as WikiText-2."""
    target = folder / "data" / "wikitext-2"
    target.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    for split, sentences in (("train", 600), ("valid", 60), ("test", 60)):
        lines = []
        for _ in range(sentences):
            first = int(draw.integers(40))
            lines.append(" ".join(f"w{(first + 3 * step) % 40}" for step in range(8)))
        (target / f"{split}.txt").write_text("\n".join(lines) + "\n")


def cora(folder: Path) -> None:
    """A graph of 1,700 papers in three fields as Cora, from a module ``requests`` that reads the file beside it."""
    draw, papers = np.random.default_rng(0), 1_700
    fields = draw.integers(0, 3, papers)
    target = folder / "cora"
    target.mkdir()
    with (target / "cora.content").open("w") as file:
        for paper in range(papers):
            marks = (draw.random(30) < np.where(np.arange(30) // 10 == fields[paper], 0.3, 0.1)).astype(int)
            marks[paper % 30] = 1
            file.write("\t".join([str(paper + 1), *map(str, marks), f"field{fields[paper]}"]) + "\n")
    edges = {(int(a), int(b)) for a, b in draw.integers(0, papers, (9_000, 2)) if fields[a] == fields[b] and a != b}
    (target / "cora.cites").write_text("".join(f"{a + 1}\t{b + 1}\n" for a, b in sorted(edges)))
    with tarfile.open(folder / "cora.tgz", "w:gz") as archive:
        archive.add(target, "cora")
    (folder / "requests.py").write_text(
        "from contextlib import contextmanager\n\n\n@contextmanager\ndef get(url, stream):\n"
        "    with open('cora.tgz', 'rb') as raw:\n        yield type('Answer', (), {'raw': raw})\n"
    )


def waves(folder: Path) -> None:
    """Sine waves, as generate_sine_wave.py makes them."""
    draw = np.random.default_rng(2)
    shifted = np.arange(60) + draw.integers(-80, 80, (11, 1))
    torch.save(np.sin(shifted / 20.0).astype("float64"), folder / "traindata.pt")


TEXT = "O God, O God! how weary, stale, flat and unprofitable seem to me all the uses of this world. " * 30


def tokens(folder: Path) -> None:
    """A text in characters, as nanoGPT's shakespeare_char."""
    letters = sorted(set(TEXT))
    numbers = np.array([letters.index(letter) for letter in TEXT], dtype=np.uint16)
    target = folder / "data" / "text"
    target.mkdir(parents=True)
    numbers[:2_000].tofile(target / "train.bin")
    numbers[2_000:].tofile(target / "val.bin")
    (target / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(letters)}))


def characters(folder: Path) -> None:
    """The same text as minGPT's input."""
    (folder / "input.txt").write_text(TEXT)


def paraphrases(folder: Path) -> None:
    """A tiny BERT and pairs of sentences, in folders with the names of the hub, and a module ``evaluate``."""
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    bert = folder / "bert-base-cased"
    bert.mkdir()
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{number}" for number in range(40))]
    (bert / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(vocab_file=str(bert / "vocab.txt"), do_lower_case=False).save_pretrained(bert)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
    )
    BertForSequenceClassification(config).save_pretrained(bert)
    glue, draw = folder / "nyu-mll" / "glue", np.random.default_rng(0)
    glue.mkdir(parents=True)
    for split, count in (("train", 88), ("validation", 40)):
        rows = []
        for number in range(count):
            words = [f"word{word}" for word in draw.integers(0, 40, 4 + number % 5)]
            other = words[::-1] if number % 2 else [f"word{word}" for word in draw.integers(0, 40, 5)]
            row = {
                "sentence1": " ".join(words),
                "sentence2": " ".join(other),
                "label": number % 2,
                "idx": number,
            }
            rows.append(json.dumps(row))
        (glue / f"{split}.jsonl").write_text("\n".join(rows) + "\n")
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "validation"))
    (glue / "README.md").write_text(f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{files}---\n")
    (folder / "evaluate.py").write_text(
        "class Accuracy:\n    hits = seen = 0\n\n    def add_batch(self, predictions, references):\n"
        "        self.hits += int((predictions == references).sum())\n        self.seen += len(references)\n\n"
        "    def compute(self):\n        value = {'accuracy': self.hits / self.seen}\n"
        "        self.hits = self.seen = 0\n        return value\n\n\n"
        "def load(*names):\n    return Accuracy()\n"
    )


def instructions(folder: Path) -> None:
    """A tiny decoder, records with an instruction and an answer, and a module ``openai`` that offers nothing."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    tiny, draw = folder / "tiny", np.random.default_rng(0)
    vocabulary = {letter: number for number, letter in enumerate(["<unk>", *map(chr, range(32, 127)), "\n"])}
    letters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=letters, unk_token="<unk>").save_pretrained(tiny)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(vocabulary),
        n_positions=512,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    GPT2LMHeadModel(config).save_pretrained(tiny)
    records = []
    for number in range(50):
        words = " ".join(f"w{word}" for word in draw.integers(0, 40, 2 + number % 7))
        given = {"input": words} if number % 3 else {}
        records.append({"instruction": "Repeat.", **given, "output": words})
    (folder / "records.json").write_text(json.dumps(records))
    (folder / "openai.py").write_text("openai_object = type('openai_object', (), {'OpenAIObject': dict})\n")


def pets(folder: Path) -> None:
    """Photos with the class in their names, and random weights of ResNet-50-D where the hub's would be kept."""
    for number in range(90):
        _photo(folder / "pets" / f"{'ab'[number % 2]}_{number:03}.jpg", number)
    import timm
    from safetensors.torch import save_file

    torch.manual_seed(0)
    model = timm.create_model("resnet50d")
    name = model.pretrained_cfg["hf_hub_id"].replace("/", "--")
    kept = folder.parent / "hf_home" / "hub" / f"models--{name}"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("0" * 40)
    (kept / "snapshots" / ("0" * 40)).mkdir(parents=True)
    save_file(model.state_dict(), kept / "snapshots" / ("0" * 40) / "model.safetensors")


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
