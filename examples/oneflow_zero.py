"""Train a classifier with OneFlow's names and ZeRO on two processes, save it, and predict with it.

    python -m zerograph.compat.oneflow.launch --nproc_per_node 2 examples/oneflow_zero.py --stage 3

Only the imports name zerograph. Every rank draws its own samples. The label of a sample is the quarter of the first
feature's range that contains it.
"""

import argparse
import tempfile
from pathlib import Path

import zerograph.compat.oneflow as flow
from zerograph.compat.oneflow import nn

FEATURES, HIDDEN, CLASSES, SAMPLES = 256, 128, 10, 128


class Classifier(nn.Graph):
    """One step: forward, backward, update."""

    def __init__(self, model: nn.Module, loss_fn: nn.Module, optimizer: flow.optim.Optimizer, stage: int) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.add_optimizer(optimizer)
        # The mode alone is stage 1; each switch adds one stage.
        self.config.set_zero_redundancy_optimizer_mode("distributed_split")
        if stage >= 2:
            flow.boxing.nccl.enable_use_compute_stream(True)
        if stage >= 3:
            flow.boxing.nccl.disable_group_boxing_by_dst_parallel(True)

    def build(self, x: flow.Tensor, y: flow.Tensor) -> flow.Tensor:
        loss = self.loss_fn(self.model(x), y)
        loss.backward()
        return loss


class Prediction(nn.Graph):
    """The forward pass. It reads the parameters as training shards them, and needs no ZeRO settings."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def build(self, x: flow.Tensor) -> flow.Tensor:
        return self.model(x).argmax(dim=1)


def samples(device: str, placement: flow.placement) -> tuple[flow.Tensor, flow.Tensor]:
    """Return this rank's samples as its part of a global batch. Labels have the shape (128, 1)."""
    x = flow.randn(SAMPLES, FEATURES).to(device)
    y = flow.ones(SAMPLES, 1, dtype=flow.int64).to(device)
    y = y + (x[:, :1] > 0) + 2 * (x[:, :1].abs() > 0.67)
    rows = flow.sbp.split(0)
    return x.to_global(placement=placement, sbp=rows), y.to_global(placement=placement, sbp=rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()

    placement = flow.placement(options.device, ranks=list(range(flow.env.get_world_size())))
    flow.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)).to(options.device)
    model.train()
    model = model.to_global(placement=placement, sbp=flow.sbp.broadcast)
    loss_fn = nn.CrossEntropyLoss().to(options.device)
    optimizer = flow.optim.SGD(model.parameters(), lr=0.1)
    before = model[0].weight.sbp

    graph = Classifier(model, loss_fn, optimizer, options.stage)
    flow.manual_seed(1 + flow.env.get_rank())
    first = last = graph(*samples(options.device, placement)).item()
    for _ in range(options.steps - 1):
        last = graph(*samples(options.device, placement)).item()

    model.eval()
    x, y = samples(options.device, placement)
    right = (Prediction(model)(x).numpy() == y.numpy()[:, 0]).mean()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model"
        flow.save(model.state_dict(), file, global_dst_rank=0)
        if flow.env.get_rank() == 0:
            print(graph)
            print(
                f"weight before {before}, after {model[0].weight.sbp}, in the file {flow.load(file)['0.weight'].shape}"
            )
            print(f"loss {first:.4f} to {last:.4f}, {right:.0%} right")


if __name__ == "__main__":
    main()
