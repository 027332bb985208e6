"""The public class, and what it is made of."""
