"""The pass runner, the pipeline and the compiler passes."""
