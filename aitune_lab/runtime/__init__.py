"""What a tuned call goes through."""
