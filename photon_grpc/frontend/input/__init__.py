"""From text, chats and ids to prompt ids."""
