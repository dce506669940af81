"""Parsers of what ptxas and the disassembler print, and of AMD's assembly."""

from machine_code import exponentials_under_wgmma, product_loops, read_sass

from fastattn.testing.compiling.cross_compile import matrix_ops, read_ptxas, wgmma_with_register_a


def test_ptxas_log_is_read() -> None:
    report = read_ptxas(
        "ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are "
        "serialized due to insufficient register resources in function 'f'\n"
        "ptxas info    : (C7999) something else\n"
        "ptxas info    : Compiling entry function 'f' for 'sm_90a'\n"
        "    24 bytes stack frame, 20 bytes spill stores, 8 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 1 barriers, 24 bytes cumulative stack size\n"
        "    0 bytes stack frame, 4 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 40 registers\n"
    )
    assert (report.registers, report.spill_store_bytes, report.spill_load_bytes) == (168, 24, 8)
    assert [warning[:7] for warning in report.warnings] == ["(C7511)"]


def test_matrix_ops_and_register_operands_are_found_in_ptx() -> None:
    shape = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16"
    ptx = (
        f"{shape} {{%f1,%f2,%f3,%f4}}, %rd1, %rd2, 1, 1, 1, 0, 0;\n"
        f"{shape} {{%f1,%f2,%f3,%f4}}, {{%r1,%r2,%r3,%r4}}, %rd2, 1, 1, 1, 0;\n"
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1,%f2}, {%r1}, {%r2}, {%f1,%f2};\n"
    )
    assert matrix_ops(ptx) == {"wgmma", "mma.sync"}
    assert wgmma_with_register_a(ptx) == 1
    assert matrix_ops("ret;") == frozenset()


# An outer loop over two inner ones, as ptxas lays them out: the body of the second (0x0090) stands
# behind the exit, control codes end some lines, and the padding jumps to itself.
SASS = """
        Function : helper
        /*0000*/                   RET.REL.NODEC R20 0x0 ;            /* 0x0000000014007950 */
        Function : kernel
        /*0000*/                   MOV R1, c[0x0][0x28] ;             /* 0x00000a0000017a02 */
                                                                      /* 0x000fc40000000f00 */
        /*0010*/                   HMMA.16816.F32 R0, R2, R4, R0 ;    /* outer */
        /*0020*/                   FFMA.FTZ R5, R5, R6, R7 ;
        /*0028*/               @P3 EXIT ;
        /*0030*/                   MUFU.EX2 R5, R5             &wr=0x1 ?trans1;  /* 0x00 */
        /*0040*/                   HMMA.16816.F32 R0, R2, R4, R0 ;
        /*0050*/              @!P0 BRA 0x20               &req={1} ?trans5;      /* 0x00 */
        /*0060*/                   BRA 0x90 ;
        /*0070*/               @P2 BRA 0x10 ;
        /*0080*/                   EXIT ;
        /*0090*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;
        /*00a0*/                   FFMA R5, R5, R6, R7 ;
        /*00b0*/                   FFMA2 R5, R5, R6, R7 ;
        /*00c0*/                   BRA P1, 0x90 ;
        /*00d0*/                   BRA 0x70 ;
        /*00e0*/                   FADD R1, R1, R1 ;
        /*00f0*/                   BRA 0xf0;
"""


def test_innermost_matrix_loops_are_found_and_counted() -> None:
    helper, kernel = read_sass(SASS)
    assert product_loops(helper) == ()
    first, second = product_loops(kernel)
    assert first.address == 0x20
    assert first.opcodes == {"FFMA.FTZ": 1, "MUFU.EX2": 1, "HMMA.16816.F32": 1, "BRA": 1, "EXIT": 1}
    assert (first.total, first.count("FFMA"), first.count("MUFU.EX2", "BRA")) == (5, 1, 2)
    assert second.address == 0x90
    assert second.opcodes == {"HGMMA.64x64x16.F32.BF16": 1, "FFMA": 1, "FFMA2": 1, "BRA": 1}
    assert second.count("FFMA") == 1


def test_the_shortest_pass_takes_every_jump_ahead() -> None:
    """Also one behind the jump back, from which another leads into the loop again."""
    (function,) = read_sass("""
        /*0000*/                   HMMA.16816.F32 R0, R2, R4, R0 ;
        /*0010*/              @!P1 BRA 0x80 ;
        /*0020*/              @!P0 BRA 0x50 ;
        /*0030*/                   FMUL R0, R0, R8 ;
        /*0040*/                   FMUL R1, R1, R8 ;
        /*0050*/               @P3 EXIT ;
        /*0060*/               @P2 BRA 0x0 ;
        /*0070*/                   EXIT ;
        /*0080*/                   NANOSLEEP 0x20 ;
        /*0090*/                   BRA 0x20 ;
    """)
    (loop,) = product_loops(function)
    assert (loop.total, loop.least) == (9, 5)


UNDER_PRODUCTS = """
        /*0000*/                   MUFU.EX2 R0, R1 ;
        /*0010*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR36], R24 ;
        /*0020*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR36], R24, gsb0 ;
        /*0030*/                   HGMMA.64x128x16.F32.BF16 R88, R4, gdesc[UR8], R88, gsb0 ;
        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0050*/                   MUFU.EX2 R0, R1 ;
        /*0060*/                   MUFU.RCP R0, R1 ;
        /*0070*/              @!P0 MUFU.EX2 R0, R1 ;
        /*0080*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0090*/                   MUFU.EX2 R0, R1 ;
"""


def test_overlap_counts_exponentials_between_issue_and_wait() -> None:
    (body,) = read_sass(UNDER_PRODUCTS)
    assert exponentials_under_wgmma(body) == 0.5
    assert exponentials_under_wgmma([i for i in body if "DEPBAR" not in i.opcode]) == 1.0
    assert exponentials_under_wgmma([i for i in body if "MUFU" not in i.opcode]) is None
