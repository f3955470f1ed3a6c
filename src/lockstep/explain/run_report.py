"""One page about a run: its curves, what its model gets wrong, its recipe, and its fingerprint with how to prove it.

Every number is one that the run folder holds, or is computed again from the weights in it; where something is missing,
the page says so. It loads nothing: pictures are in it.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from lockstep.config.job import JobConfig
from lockstep.core.fingerprint import combine, digest_tensors
from lockstep.core.world import World
from lockstep.data.adopt import adopt
from lockstep.data.naming import path_of
from lockstep.errors import ConfigError, LockstepError
from lockstep.explain.chart import html_document, svg, table
from lockstep.explain.curves import FILE, RunLog, chart, final_table, read_logs
from lockstep.explain.timeline import explain_timeline, timeline_svg
from lockstep.job.assemble import balance, build_model, collated, data_to_predict
from lockstep.job.instantiate import importable_from, instantiate_function
from lockstep.job.prediction import class_names, has_gone_on, load_run
from lockstep.job.run_folder import Start, one_recipe, read_outcome, read_starts
from lockstep.run import Run
from lockstep.text import percent, plural
from lockstep.trainer.state import Accuracy, is_of_log_probabilities
from lockstep.trainer.trainer import WEIGHTS

_MOST_WRONG = 24
_MOST_CLASSES = 40
"""Classes up to which the confusion matrix is drawn; beyond it the most frequent confusions are listed."""


@dataclass(frozen=True)
class Answers:
    """The model's answers for the validation data, computed again."""

    classes: tuple[str, ...]
    names: tuple[str, ...]
    labels: Tensor
    """Int64, of shape (samples,)."""
    predicted: Tensor
    """The same of the highest score."""
    certainty: Tensor
    """The probability of that class, of shape (samples,)."""
    pictures: Mapping[int, str]
    """``data:`` addresses of the pictures of some samples, by number."""

    @property
    def wrong(self) -> list[int]:
        """The samples that the model gets wrong; those it is most certain of come first."""
        found = (self.predicted != self.labels).nonzero().flatten().tolist()
        return sorted(found, key=lambda index: (-float(self.certainty[index]), index))

    def confusion(self) -> Tensor:
        """Counts of shape (classes, classes): of each label, how often each class was predicted."""
        size = len(self.classes)
        return torch.bincount(self.labels * size + self.predicted, minlength=size * size).view(size, size)


def answers_of(folder: Path, job: JobConfig) -> Answers:
    """Predicts the validation data of a job with the last weights of its run, on one device in this process.

    Raises:
        ConfigError: the job has no validation data, or does not sort into classes.
    """
    if job.data.validation is None:
        raise ConfigError("The job has no [data.validation].")
    importable_from(job.code)
    loss = instantiate_function(job.loss, ("loss",))
    if (accuracy := Accuracy.of(loss)) is None:
        raise ConfigError(f"The loss of the job, {job.loss.target}, is not one for classification.")
    alone = dataclasses.replace(job.training, strategy="single", mesh="")
    begun = dataclasses.replace(job.checkpoint, resume="")
    options = dataclasses.replace(job, training=alone, checkpoint=begun).run_options(None)
    with closing(Run(options, World())) as run:
        data_set = data_to_predict(job, job.data.validation)
        source = collated(data_set, job.data)
        model = build_model(job)
        load_run(model, folder, best=False)
        balance(run, model, source)
        run.prepare(model, values_from_main=True)
        run.evaluate(source, {"answers": (seen := _Seen())}, workers=0)
    outputs, targets = map(torch.cat, zip(*seen, strict=True))
    if outputs.dim() != 2:
        raise ConfigError("The model does not give one row of scores for each sample.")
    scores = outputs.double()
    if without := int(scores.isnan().any(1).sum()):
        raise ConfigError(f"The model gives NaN for {without:,} of {plural(len(scores), 'sample')}.")
    predicted = scores.argmax(1)  # as accuracy does: probabilities may be equal where scores are not
    certainty = (scores.exp() if is_of_log_probabilities(loss) else scores.softmax(1)).amax(1)
    labels, counted = accuracy.labels(targets)
    numbers, labels, data_set = counted.nonzero().flatten().tolist(), labels[counted], adopt(source).dataset
    names = class_names(folder, job) or tuple(map(str, range(scores.shape[1])))
    if len(names) != scores.shape[1] or not {*labels.tolist()} <= {*range(len(names))} or not len(labels):
        raise ConfigError("The labels of the validation data are not the classes of the model.")
    paths = tuple(path_of(data_set, number) or f"sample {number}" for number in numbers)
    found = Answers(names, paths, labels, predicted[counted], certainty[counted], {})
    shown = {index: picture_of(data_set[numbers[index]][0]) for index in found.wrong[:_MOST_WRONG]}
    return dataclasses.replace(found, pictures={index: each for index, each in shown.items() if each})


class _Seen(list[tuple[Tensor, Tensor]]):
    """The outputs and targets of an evaluation, as a metric of it."""

    reset = list.clear

    def update(self, output: Tensor, target: Tensor) -> None:
        self.append((output, target))

    def compute(self) -> float:
        return 0.0


def picture_of(sample: Any) -> str:
    """A sample as a ``data:`` address of a PNG; empty where it is not a picture of one or three colours."""
    from PIL import Image

    if not isinstance(sample, Tensor):
        return ""
    values = sample.detach().cpu()
    values = values[0] if values.dim() == 3 and values.shape[0] == 1 else values
    if not (values.dim() == 2 or (values.dim() == 3 and values.shape[0] == 3)) or min(values.shape[-2:]) < 4:
        return ""
    if values.dtype != torch.uint8:
        numbers = values.double()
        low, high = numbers.min(), numbers.max()
        values = ((numbers - low) / (high - low).clamp_min(1e-12) * 255).round().to(torch.uint8)
    pixels = values.permute(1, 2, 0) if values.dim() == 3 else values
    data = io.BytesIO()
    Image.fromarray(pixels.contiguous().numpy()).save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def run_page(folder: Path, *, computes: bool = True) -> str:
    """The page about a run.

    Args:
        folder: of the run.
        computes: also what the model says of the validation data, for which the job's code is run.

    Raises:
        ConfigError: the folder is not that of a run of ``lockstep train``.
    """
    starts = read_starts(folder)
    title = f"Run {folder.resolve().name}"
    log = read_logs([folder])[0] if (folder / FILE).is_file() else None
    parts = [f"<h1>{escape(title)}</h1>", *_failure(folder), *_curves(log)]
    parts += ["<h2>Time of each rank</h2>", _rank_time(folder)]
    parts += _answers(folder, starts[-1].job, log, computes)
    parts += ["<h2>Fingerprint</h2>", *_fingerprint(folder, starts)]
    rows = [(str(each.step), each.strategy, str(each.ranks), each.level, each.device) for each in starts]
    parts += ["<h2>Starts</h2>", table([("from step", "strategy", "ranks", "level", "device"), *rows])]
    parts += ["<h2>Settings</h2>", _settings(starts[-1])]
    return html_document(title, parts)


def _note(sentence: str) -> str:
    return f'<p class="limit">{escape(sentence)}</p>'


def _failure(folder: Path) -> list[str]:
    """The launcher's report of the last start, or of its last restart, where that failed."""
    restarts = sorted((folder / "ranks").glob("restart-*"), key=lambda each: (len(each.name), each.name))
    report = [folder / "ranks", *restarts][-1] / "report.txt"
    if not report.is_file():
        return []
    return ["<h2>The last start failed</h2>", f"<pre>{escape(report.read_text(errors='replace'))}</pre>"]


def _curves(log: RunLog | None) -> list[str]:
    if log is None:
        why = f"the run has no {FILE} (log.json = false), or ended before its first line"
        return [_note(f"There are no curves: {why}.")]
    try:
        drawn = svg(chart([log], also=("samples_per_second",)))
    except ConfigError as error:
        return [_note(str(error))]
    return ["<h2>Curves</h2>", f'<figure class="scroll">{drawn}</figure>', table(final_table([log]))]


def _rank_time(folder: Path) -> str:
    path = folder / "timeline.json"
    if not path.is_file():
        return _note("The time of each rank was not recorded. Train with --profile to have it.")
    try:
        return f'<figure class="scroll">{timeline_svg(explain_timeline(path))}</figure>'
    except LockstepError as error:
        return _note(str(error))


def _answers(folder: Path, job: JobConfig, log: RunLog | None, computes: bool) -> list[str]:
    """The wrong samples and the confusion matrix, or why there are none."""
    head = "<h2>What the model gets wrong</h2>"
    if not computes:
        return [head, _note("Not computed, because --recorded-only was given.")]
    try:
        found = answers_of(folder, job)
    except (LockstepError, OSError, ValueError, TypeError, LookupError, ImportError) as error:
        return [head, _note(f"This cannot be computed again: {error}")]
    right = len(found.labels) - len(found.wrong)
    text = f"Computed again with the last weights: {right:,} of {plural(len(found.labels), 'sample')} are correct "
    text += f"({percent(right / len(found.labels))})."
    evaluations = log.values("validation_accuracy") if log is not None else []
    if job.training.ema_decay is not None:
        text += " The accuracy in the log is that of the moving average of the weights, and may differ."
    elif evaluations and evaluations[-1][1] <= 1:
        after, recorded = plural(evaluations[-1][0]["step"], "step"), percent(evaluations[-1][1])
        text += f" The last evaluation in the log, after {after}, has {recorded}."
    matrix = _confusion(found)
    return [head, f"<p>{escape(text)}</p>", _wrong_samples(found), "<h2>Confusion matrix</h2>", matrix]


def _wrong_samples(found: Answers) -> str:
    if not found.wrong:
        return "<p>No sample is wrong.</p>"
    cells = []
    for index in found.wrong[:_MOST_WRONG]:
        picture = found.pictures.get(index)
        image = f'<img src="{picture}" alt="" width="112" height="112">' if picture else ""
        true, predicted = (escape(found.classes[int(each[index])]) for each in (found.labels, found.predicted))
        certain = f"({percent(float(found.certainty[index]), 1)})"
        words = f"{escape(found.names[index])}<br>true <b>{true}</b>, predicted <b>{predicted}</b> {certain}"
        cells.append(f"<div>{image}<p>{words}</p></div>")
    rest = len(found.wrong) - len(cells)
    more = f"<p>{rest:,} more are wrong.</p>" if rest > 0 else ""
    return f'<div class="samples">{"".join(cells)}</div>{more}'


def _confusion(found: Answers) -> str:
    counts = found.confusion()
    if len(found.classes) > _MOST_CLASSES:
        pairs = [(int(counts[a, b]), a, b) for a, b in counts.nonzero().tolist() if a != b]
        largest = sorted(pairs, reverse=True)[:20]
        rows = [(found.classes[a], found.classes[b], f"{n:,}") for n, a, b in largest]
        return table([("true", "predicted", "samples"), *rows])
    most = max(1, int(counts.max()))
    head = "".join(f"<th>{escape(name)}</th>" for name in found.classes)
    lines = [f"<tr><th>true \\ predicted</th>{head}</tr>"]
    for label, name in enumerate(found.classes):
        cells = ""
        for predicted, count in enumerate(counts[label].tolist()):
            colour = "47, 109, 181" if predicted == label else "181, 58, 74"
            cells += f'<td style="background: rgba({colour}, {0.6 * count / most:.2f})">{count:,}</td>'
        lines.append(f"<tr><th>{escape(name)}</th>{cells}</tr>")
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


def _fingerprint(folder: Path, starts: Sequence[Start]) -> list[str]:
    outcome, parts = read_outcome(folder), []
    if outcome and has_gone_on(folder):
        return [_note("There is none: the run ended once, went on, and has not ended again.")]
    recorded = found = str(outcome.get("fingerprint", ""))
    if (folder / WEIGHTS).is_file():
        found = combine(digest_tensors(safetensors.torch.load_file(folder / WEIGHTS)))
        parts.append(f"<p><code>{found}</code></p><p>Computed again from {WEIGHTS}.</p>")
        if recorded and recorded != found:
            parts.append(_note(f"The run ended with another one: {recorded}. The weights were changed since."))
    elif recorded:
        parts.append(f"<p><code>{escape(recorded)}</code></p>")
        parts.append(_note(f"As the run recorded it; {WEIGHTS} is gone, so it cannot be computed again."))
    else:
        parts.append(_note("There is none: the run has not ended."))
    if proof := str(outcome.get("proof", "")):
        which = "the same fingerprint" if recorded == found else "the fingerprint in which the run ended"
        parts.append(f"<p>This command ends in {which}:</p><pre>{escape(proof)}</pre>")
    else:
        why = "the run did not record one" if one_recipe(starts) else "its starts had several recipes"
        parts.append(_note(f"No command is known that trains it again: {why}, or its level is not A."))
    return parts


def _settings(start: Start) -> str:
    """The settings of the last start, and the conditions that its bits depend on."""
    rows = [("setting", "value")]
    for name, value in json.loads(start.job.to_json()).items():
        inner = value.items() if isinstance(value, dict) else [("", value)]
        rows += [(".".join(filter(None, (name, key))), _shown(each)) for key, each in inner]
    conditions = [("condition", "value"), *((name, _shown(value)) for name, value in start.context.items())]
    return f"{table(rows)}<h2>What the bits depend on</h2>{table(conditions)}"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
