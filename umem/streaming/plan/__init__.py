"""What moves when: plans of a step for a budget, and the times that they predict."""
