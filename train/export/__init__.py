"""From a training checkpoint to the folder that a server loads: a verified difference against the base model."""
