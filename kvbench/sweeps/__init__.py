"""Many runs of one command: composed, checked, followed."""
