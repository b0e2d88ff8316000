"""Floor 0: tensors in, tensors out. No state, no I/O, no collectives; a reducer over ranks is always an argument."""
