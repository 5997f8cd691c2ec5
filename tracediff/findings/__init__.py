"""What a result says in words: findings, the summary, what is normal, what could not be judged. No layout."""
