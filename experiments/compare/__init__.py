"""Do policies differ, by how much, and from which step on?"""
