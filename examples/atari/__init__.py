"""What async_rollout.py needs besides messages: the games, the policy, how it learns, and the report."""
