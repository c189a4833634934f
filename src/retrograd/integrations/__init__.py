"""Integrations: callbacks for trainers that are not ours, one library a file; nothing else imports this room."""
