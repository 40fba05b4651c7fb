"""The target: where it comes from, how it is loaded, how its chats are tokenised."""
