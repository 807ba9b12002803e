"""An executor of AMD's machine code: what LLVM makes of the kernels, run instruction by instruction on numpy.

The instructions' meaning comes from AMD's own pseudocode, which tinygrad's wheel holds beside its decoder. Matrix
instructions, memory, waits and barriers, for which there is none, are written here.

A wave is a set of registers for all its lanes. Each register has two values, of two runs that differ only in what
uninitialised registers, LDS and scratch memory hold. Where they would decide an address, a branch or what is stored,
the two differ, and that is an error. So nothing needs to know how an instruction passes on what is not initialised.

Source: AMD, "RDNA3 Instruction Set Architecture", "RDNA4 Instruction Set Architecture", "AMD Instinct MI300 Instruction
Set Architecture" and "AMD Instinct CDNA4 Instruction Set Architecture".
"""
