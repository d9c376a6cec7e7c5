"""The job's registry: who lives where, the job's configuration, news of deaths."""
