"""Question 5: find the bugs in a Trainer with a weight per class."""

from functools import partial

import torch
from torch.nn.utils import parameters_to_vector

from ddp_course.checks.claims import on_every_rank
from ddp_course.checks.ex08.on_ranks import LEARNING_RATE, PRELOADED, TIMEOUT, Meeting, settings
from ddp_course.checks.ex08.weighted_cases import ACCUMULATION, Named, Rows, draw_case
from ddp_course.checks.ex08.weighted_claims import claims, kept
from ddp_course.checks.ported import RECORD, trained_on
from ddp_course.checks.recording import changed
from ddp_course.checks.training import state
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.ranks.launch import start_server


def observe_weighted(kind, case):
    """What a rank has trained on, its parameters at each evaluation, and what it has kept."""
    meeting, updates, evaluated, returned, changes = Meeting(), [], [], [], {}
    train_set, test_set = map(Rows, case.data)
    model = Named(case.seed + meeting.rank)
    before = {}
    RECORD.clear()

    def error(prediction):
        evaluated.append(parameters_to_vector(model.parameters()).detach().clone())
        before.update(state(model))
        return {"error": case.errors[len(evaluated) - 1]}

    def note(metrics):
        returned.append(metrics.get("eval_error") if isinstance(metrics, dict) else None)
        changes[len(evaluated)] = changed(before, model.state_dict())

    options = {
        "per_device_train_batch_size": case.batch_size,
        "gradient_accumulation_steps": ACCUMULATION[case.n],
        "num_train_epochs": len(case.errors),
        "train_sampling_strategy": "random",
        "eval_strategy": "epoch",
        "logging_strategy": "no",
        "label_names": ["labels"],
    }
    with settings(meeting, **options) as made:
        from transformers.trainer_callback import PrinterCallback

        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        optimizer.register_step_post_hook(lambda *_: updates.append({"batches": len(trained_on())}))
        parts = {"train_dataset": train_set, "eval_dataset": test_set, "compute_metrics": error}
        weights = torch.tensor(case.weights, dtype=torch.float64)
        with trying(str(case)):
            trainer = kind(model, made, optimizers=(optimizer, None), weights=weights, **parts)
            trainer.remove_callback(PrinterCallback)
            trainer.evaluate = noting(trainer.evaluate, note)
            trainer.train()
        return {
            "trained": trained_on(),
            "updates": updates,
            "evaluated": evaluated,
            "returned": returned,
            "changes": changes,
            "names": list(model.state_dict()),
            "parameters": [name for name, _ in model.named_parameters()],
            "best": kept(getattr(trainer, "best", None), model),
        }


def noting(evaluate, note):
    """evaluate, which also gives what it returns to `note`."""

    def and_note(*given, **named):
        metrics = evaluate(*given, **named)
        note(metrics)
        return metrics

    return and_note


@question(
    "Look at three things on 2 ranks: the number of updates in an epoch; the loss of a micro-batch whose samples are all of "
    "one class, with two different weights for that class; and trainer.best before and after the next epoch.",
    "Three places. Who divides the samples among the ranks, and how often? By what does F.cross_entropy divide if it is "
    "given weights? (Its documentation says it under reduction.) And does state_dict() copy the parameters?",
    "Leave out get_train_dataloader: Trainer makes such a loader from train_dataset. In compute_loss: "
    "F.cross_entropy(outputs['logits'], labels, self.weights, reduction='none').mean(). In evaluate: "
    "self.best = {name: value.clone() for name, value in self.model.state_dict().items()}.",
)
def check_weighted_trainer(answer, draw):
    """Each rank trains on its share of the samples, the updates are those of one process, and
    the best parameters are kept.
    """
    start_server(*PRELOADED)  # where none runs yet
    for n in (2, 3):
        case = draw_case(draw, n)
        of_ranks = answer.on_ranks(observe_weighted, case, nproc=n, timeout=TIMEOUT)
        on_every_rank(partial(claims, case), of_ranks)
