"""Our own GPU kernels, in Triton. They are imported only when used, because Triton is not installed everywhere."""
