"""Integrations: callbacks for trainers, and the plugin for pytest, a library each; nothing else imports this room."""
