"""Pipeline parallelism as data: stages, the order of every rank's actions, and their simulation."""
