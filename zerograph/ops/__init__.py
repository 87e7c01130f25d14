"""The operators of zerograph itself: their mathematics, as torch has it, and their shapes."""
