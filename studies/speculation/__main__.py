from studies.speculation.study import main

main()
