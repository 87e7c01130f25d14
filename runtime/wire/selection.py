"""Choose between torch's collectives and our exchanges, by what the ranks share.

Over gloo a gather is always an exchange. With several of ``_c10d_functional``'s all-gathers in flight torch 2.13 writes
into freed memory: twenty thousand small ones on two ranks end in glibc's "unaligned tcache chunk" or a segmentation
fault. Its reductions do not, nor does one gather at a time. A reduce-scatter is an exchange, too: gloo's reduces all of
the tensor to every rank, which sends twice as many bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from zerograph._torch import OpOverload
from zerograph.errors import ConfigError
from zerograph.ir.hosts import HostLayout, hosts_of_equal_size
from zerograph.ir.mesh import Mesh
from zerograph.runtime.job.process_group import Job
from zerograph.runtime.wire import collectives, direct

# Used over gloo in any case.
_ALWAYS: dict[str, OpOverload] = {
    "all-gather": collectives.gather_pieces,
    "all-gather into gather buffer": collectives.gather_into,
    "reduce-scatter": collectives.exchange_pieces,
}
# Used where ranks read each other's memory.
_DIRECT: dict[str, OpOverload] = {
    "all-reduce": collectives.sum_ranks,
    "all-reduce in place": collectives.sum_ranks_,
}
# Used where each of several hosts has several ranks.
_ACROSS_HOSTS: dict[str, OpOverload] = {
    "reduce-scatter, summed": collectives.reduce_pieces,
    "reduce-scatter, coded": collectives.reduce_coded,
}


@dataclass(frozen=True)
class Transport:
    """How ranks exchange tensors.

    Attributes:
        exchanges: the operators that replace torch's collectives, by collective.
        hosts: which ranks share a host; None: unknown.
    """

    exchanges: Mapping[str, OpOverload]
    hosts: HostLayout | None = None


def transport_of(job: Job) -> Transport:
    """Return the transport of a job. Every rank must call it.

    Raises:
        CommunicationError: a rank did not answer.
    """
    return Transport(select_exchanges(job), direct.layout(job))


def named_transport(name: str, mesh: Mesh) -> Transport:
    """Return the transport of that name between the ranks of a mesh; see :meth:`zerograph.ZeroGraph.prepare`.

    The transports are ``"torch"``; ``"gloo"``; ``"host"``, gloo where all ranks read each other's memory; and
    ``"hosts"``, gloo where each of two hosts has several ranks, which read each other's memory, or ``"hosts:3"``.

    Raises:
        ConfigError: there is no such transport, or not on this mesh: that many hosts cannot have several ranks each,
            equally many.
    """
    transports = {
        "torch": Transport({}),
        "gloo": Transport(_ALWAYS, hosts_of_equal_size(mesh.size, 1)),
        "host": Transport(_ALWAYS | _DIRECT, hosts_of_equal_size(mesh.size, mesh.size)),
    }
    if name in transports:
        return transports[name]
    number = re.fullmatch(r"hosts(?::(\d{1,6}))?", name)
    if number is None:
        raise ConfigError(f"there is no transport {name!r:.60}: choose {', '.join(transports)}, hosts, or hosts:3")
    hosts = int(number[1] or 2)
    if mesh.dims > 1 or mesh.size % hosts or not 1 < hosts < mesh.size:
        raise ConfigError(f"transport {name!r}: {mesh.shape} ranks are not several on each of {hosts} hosts")
    return Transport(_ALWAYS | _DIRECT | _ACROSS_HOSTS, hosts_of_equal_size(mesh.size, mesh.size // hosts))


def select_exchanges(job: Job) -> Mapping[str, OpOverload]:
    """Return the exchanges that replace torch's collectives in this job, by kind. Every rank must call it.

    Only gloo's collectives are replaced; NCCL uses the wire better.

    Raises:
        CommunicationError: a rank did not answer.
    """
    if job.size == 1 or any(group.name() != "gloo" for group in job.groups):
        return {}
    hosts = direct.hosts(job)
    # All ranks' groups count: if hosts have differently shaped parts of the mesh, other ranks have other groups.
    if hosts.everywhere:
        return _ALWAYS | _DIRECT
    if hosts.spanning is not None:
        return _ALWAYS | _DIRECT | _ACROSS_HOSTS
    return _ALWAYS
