"""What is chosen by the device: kernels by compute capability, formats by width."""
