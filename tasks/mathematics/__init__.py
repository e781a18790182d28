"""Problems of mathematics with a boxed answer: AIME and MATH500."""
