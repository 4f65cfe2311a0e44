"""Pipeline parallelism: stages of a model on ranks of `pp`, and the schedules that they run."""
