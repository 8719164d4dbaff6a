"""Functions called from kernels. Needs CuTe DSL; nothing outside `ep.kernels` imports it."""
