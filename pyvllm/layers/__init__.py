"""The parts that decoders are put together from. Each is chosen by a field of `ModelSpec`, never by a family's name."""
