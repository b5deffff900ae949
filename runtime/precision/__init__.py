"""Number formats below 16 bits in training: linear layers, what FSDP gathers, what stays saved for backward, what crosses the wire."""
