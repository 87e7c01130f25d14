"""``flow.nn.graph``: ``Graph``, its configuration, and the settings of modules in it."""

from zerograph.compat.oneflow.nn.graph.config import GraphConfig
from zerograph.compat.oneflow.nn.graph.graph import Graph
from zerograph.compat.oneflow.nn.graph.module import GraphModule, GraphTensor

__all__ = ["Graph", "GraphConfig", "GraphModule", "GraphTensor"]
