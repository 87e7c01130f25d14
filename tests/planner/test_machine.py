"""Machines are numbers in files, which are checked when they are read."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import zerograph as zg
from zerograph.ir.mesh import Mesh
from zerograph.ir.metadata import Boxing
from zerograph.ir.sbp import broadcast, split
from zerograph.planner import costs
from zerograph.planner.costs import seconds
from zerograph.planner.machine import Device, Link, Machine, Rate, machine, names, write


@pytest.mark.parametrize("name", ["a100", "cpu", "h100", "h200"])
def test_those_that_are_built_in(name: str) -> None:
    assert name in names()
    found = machine(name)
    assert found.name == name
    assert found.source


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = machine("cpu")
    write(tmp_path / "mine.yaml", written)
    assert machine(tmp_path / "mine.yaml") == written


def test_a_rate_between_two_points_and_outside() -> None:
    rate = Rate(((1e3, 1e6), (1e5, 1e8)))
    assert rate.seconds(1e3) == 1e-3
    # Halfway on log scales.
    assert rate.seconds(1e4) == pytest.approx(1e4 / 1e7)
    assert rate.seconds(10) == 10 / 1e6
    assert rate.seconds(1e7) == 1e7 / 1e8
    assert rate.seconds(0) == 0


def test_products_of_other_kinds_reach_a_share_and_a_step_takes_longer() -> None:
    """Return a measured layer: the product at its rate, a convolution at half of it, all a quarter longer in a step."""
    plain = Device(
        memory=1, products={"float32": Rate(((1.0, 1e9),))}, moved={"memory": Rate(((1.0, 1e18),))}, overhead=0
    )
    slower = dataclasses.replace(plain, shares={"convolution": 0.5}, in_step=1.25)

    graph = make_fx(lambda x, w, v: (F.conv2d(x, w), x.flatten(1) @ v), tracing_mode="fake")(
        torch.ones(2, 3, 8, 8), torch.ones(4, 3, 3, 3), torch.ones(192, 5)
    ).graph
    product = next(node for node in graph.nodes if "mm" in node.name)
    convolution = next(node for node in graph.nodes if "conv" in node.name)
    assert seconds(product, plain) == pytest.approx(2 * 2 * 192 * 5 / 1e9)
    assert seconds(convolution, plain) == pytest.approx(2 * 2 * 4 * 36 * 27 / 1e9)
    assert seconds(product, slower) == pytest.approx(1.25 * seconds(product, plain))
    assert seconds(convolution, slower) == pytest.approx(2 * 1.25 * seconds(convolution, plain))


def wire_seconds(boxing: Boxing, mesh: Mesh, described: Machine) -> float:
    return costs.wire_seconds(boxing, mesh, described)[0]


def gather(mesh: Mesh, dim: int, sent: float) -> Boxing:
    """Return the boxing of a tensor of which each rank along ``dim`` sends this many bytes."""
    source, target = [broadcast] * mesh.dims, [broadcast] * mesh.dims
    source[dim] = split(0)
    ranks = mesh.shape[dim]
    return Boxing(tuple(source), tuple(target), dim, ranks, "it", round(sent * ranks / (ranks - 1)), "forward")


@pytest.mark.parametrize(
    ("shape", "dim", "levels", "rate"),
    [
        ((8,), 0, [(6e-6, 3)], 360e9),
        ((64,), 0, [(6e-6, 3), (15e-6, 3)], 8 * 40e9),
        ((8, 8), 1, [(6e-6, 3)], 360e9),
        ((8, 8), 0, [(15e-6, 3)], 40e9),
        ((4, 2), 0, [(6e-6, 2)], 360e9),
    ],
)
def test_a_collective_is_as_slow_as_the_farthest_link_that_it_crosses(
    shape: tuple[int, ...], dim: int, levels: list[tuple[float, int]], rate: float
) -> None:
    mesh = Mesh(shape, (0,) * len(shape), ("",) * len(shape))
    # Doubling: as many rounds within each level as its parts have powers of two. Eight ranks of a node share its eight
    # links to the other nodes, of 40 GB/s each, as the rings of NCCL do.
    expected = sum(latency * rounds for latency, rounds in levels) + 1e9 / rate
    assert wire_seconds(gather(mesh, dim, 1e9), mesh, machine("h100")) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[", "does not describe"),
        ("name: x", "lacks 'device'"),
        ("{name: x, device: {memory: -1}}", "does not describe"),
        ("7", "does not describe"),
        (None, "the last one all"),
    ],
)
def test_files_that_describe_none(tmp_path: Path, text: str | None, words: str) -> None:
    write(tmp_path / "bad.yaml", machine("h100"))
    # Links join more and more ranks.
    limited = (tmp_path / "bad.yaml").read_text().replace("ranks: null", "ranks: 4")
    (tmp_path / "bad.yaml").write_text(limited if text is None else text)
    with pytest.raises(zg.ConfigError, match=words):
        machine(tmp_path / "bad.yaml")


def test_only_rings_share_the_links_of_a_node() -> None:
    """An all-to-all's pieces leave by their own rank's link, and so do those of the CPU's exchanges."""
    mesh, h100 = Mesh((64,), (0,), ("",)), machine("h100")
    gathers = gather(mesh, 0, 1e9)
    turned = dataclasses.replace(gathers, source=(split(0),), target=(split(1),))
    assert turned.kind == "all-to-all"
    assert wire_seconds(turned, mesh, h100) > 1e9 * 7 / 8 / 64 / 40e9
    cpu = dataclasses.replace(h100, device=dataclasses.replace(h100.device, accelerator=False))
    # Not equally many on each node, so not exchanged node by node.
    uneven = Mesh((60,), (0,), ("",))
    assert wire_seconds(gather(uneven, 0, 1e9), uneven, cpu) == pytest.approx(1e9 / 40e9, rel=0.01)
    assert wire_seconds(gathers, mesh, h100) < wire_seconds(gather(uneven, 0, 1e9), uneven, cpu) / 7


def test_a_grid_with_its_ranks_goes_over_the_links_between_them() -> None:
    # hpZ: ranks of a host differ along the first dimension, hosts along the second.
    mesh, h100 = Mesh((8, 8), (0, 0), ("ranks", "hosts")), machine("h100")
    order = tuple(8 * host + rank for rank in range(8) for host in range(8))
    placed = dataclasses.replace(h100, order=order)
    for dim in range(2):
        assert wire_seconds(gather(mesh, dim, 1e9), mesh, placed) == pytest.approx(
            wire_seconds(gather(mesh, 1 - dim, 1e9), mesh, h100)
        )


def test_exchanges_over_gloo_cross_the_wire_once_per_host_and_only_inside_of_a_host_may_stop_computing() -> None:
    links = (Link(2, Rate(((1.0, 1e9),)), 0.0, overlap=0.0), Link(None, Rate(((1.0, 1e8),)), 0.0))
    hosts = dataclasses.replace(machine("cpu"), links=links, overlap=1.0)
    gather = Boxing((split(0),), (broadcast,), 0, 4, "it", 4 * 10**8, "forward")
    # A rank hands half of 400 MB on inside of its host, and sends its own quarter to the other host.
    taken, stopped = costs.wire_seconds(gather, Mesh((4,), (0,), ("ranks",)), hosts)
    assert taken == pytest.approx(2e8 / 1e9 + 1e8 / 1e8)
    assert stopped == pytest.approx(2e8 / 1e9)
