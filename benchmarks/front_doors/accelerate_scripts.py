"""Accelerate's ``nlp_example.py`` on generated data."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch.utils.data import DataLoader

from benchmarks.front_doors.door import Door
from benchmarks.front_doors.trainers import bert, sentences
from tests.integrations.trainers import tokenizer


def nlp_example(door: Door) -> list[float]:
    """Train BERT to classify sentences in a loop of Accelerate, with a schedule, and count the right answers."""
    accelerator_class = door.accelerator()
    accelerator = accelerator_class(cpu=True, gradient_accumulation_steps=door.accumulation)
    dataset: Any = [{**one, "labels": sum(one["input_ids"]) % 3} for one in sentences()]

    def collate_fn(examples: list[Any]) -> Any:
        return tokenizer().pad(examples, padding="longest", return_tensors="pt")

    shared = {"collate_fn": collate_fn, "batch_size": door.batch_size}
    train_dataloader, eval_dataloader = DataLoader(dataset, shuffle=True, **shared), DataLoader(dataset[:13], **shared)
    model = bert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    num_epochs = -(-door.steps * door.accumulation * 8 // len(dataset))
    lr_scheduler = transformers.get_linear_schedule_with_warmup(
        optimizer=optimizer,
        num_warmup_steps=0,
        num_training_steps=len(train_dataloader) * num_epochs // door.accumulation,
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    printed = []
    for _ in range(num_epochs):
        model.train()
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                outputs = model(**batch)
                accelerator.backward(outputs.loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                printed.append(outputs.loss.item())
    model.eval()
    right = 0
    for batch in eval_dataloader:
        with torch.no_grad():
            outputs = model(**batch)
        predictions, references = accelerator.gather_for_metrics((outputs.logits.argmax(-1), batch["labels"]))
        right += int((predictions == references).sum())
    return [*printed, float(right)]
