"""`kvboost bench`: workloads, systems and policies on one clock, with quality beside speed."""
