"""What is trained on: chats, their ids, and the mask of what is supervised."""
