"""Views of a compiled or prepared step: a page, text, diffs, the lifetime of a tensor, exports."""

from zerograph.inspection.collectives import Collective
from zerograph.inspection.diff import Change, Diff, compare
from zerograph.inspection.lifetime import Event, Life
from zerograph.inspection.step import Inspection, Prepared

__all__ = ["Change", "Collective", "Diff", "Event", "Inspection", "Life", "Prepared", "compare"]
