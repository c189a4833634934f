"""Why a gradient is missing, or zero."""
