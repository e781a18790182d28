"""The papers' tables: as data, as runs, and beside what was measured."""
